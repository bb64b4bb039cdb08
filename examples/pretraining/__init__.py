"""The parts of `examples/pretrain.py`, one idea a file: data, model, ranks, training, run folder, picture."""
