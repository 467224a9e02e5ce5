"""The node test: hostd installed on a booted Debian node, and what must hold there."""
