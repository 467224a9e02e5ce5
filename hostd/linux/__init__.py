"""What the kernel says and does: thin and typed, without policy and without KubeVirt."""
