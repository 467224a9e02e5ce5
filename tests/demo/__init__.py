"""`make demo`: a VM dies while no agent is there, and its layers go. All of it real, on a node of its own."""
