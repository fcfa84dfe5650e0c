"""The catalog and its rules: one library for the controller and every front door."""
