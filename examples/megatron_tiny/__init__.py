"""The parts of examples/megatron_pretrain.py."""
