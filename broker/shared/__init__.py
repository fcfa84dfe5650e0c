"""What front doors and the controller both use: their messages, logins and settings."""
