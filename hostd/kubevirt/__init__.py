"""The only place that knows kubelet's and KubeVirt's conventions: paths, records, cgroups, what a QEMU looks like."""
