"""The command `kvmosaic plan`: what fits on a device, and how a prompt is composed."""
