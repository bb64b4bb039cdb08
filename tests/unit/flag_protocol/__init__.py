"""The flag protocol of docs/protocol.md as a state machine, explored exhaustively."""
