"""What runs inside a user's process, and what starts it. Standard library only, wherever Salus is installed."""
