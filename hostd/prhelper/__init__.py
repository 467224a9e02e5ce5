"""qemu-pr-helper, kept running: its listener, its process, its place beside KubeVirt's own."""
