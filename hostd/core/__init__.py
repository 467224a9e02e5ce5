"""What hostd knows of its VMs, what follows from that, and the doing of it."""
