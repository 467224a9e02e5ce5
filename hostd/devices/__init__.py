"""Which VM has which device: claims on PCI, mediated and USB devices."""
