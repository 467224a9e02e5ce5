"""Measurements: every figure stands beside its floor or peer, measured in the same run. They print; people judge."""
