"""The user's own script, unchanged and faster: its loop is found while it runs, and obeys plans from outside."""
