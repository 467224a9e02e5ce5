"""Chaos: real QEMUs and mounts, and everything around them killed at random moments."""
