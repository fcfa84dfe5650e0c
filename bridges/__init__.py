"""Bridges to other brokers: a process that moves messages between this broker and others."""
