"""The commands `kvmosaic vllm` and `kvmosaic check --vllm`."""
