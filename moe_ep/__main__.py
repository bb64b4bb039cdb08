"""`python -m moe_ep`: the command `moe-ep` where the folder of scripts is not on PATH."""

from moe_ep.cli import main

main(prog_name="python -m moe_ep")
