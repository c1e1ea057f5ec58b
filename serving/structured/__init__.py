"""Grammars that outputs must match: checked and compiled at the door, followed token by token in the engine."""
