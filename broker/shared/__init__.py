"""The messages, logins and settings that front doors and the controller share."""
