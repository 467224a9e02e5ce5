"""hostd: what KubeVirt's agent mounted for a VM goes when its QEMU dies, agent or no agent."""

__version__ = "0.1.0"
