"""What the front door and the controller both use: their messages to each other, logins, settings."""
