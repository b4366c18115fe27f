"""What runs: artifacts, the by-value ABI, planes, plans and the thread team. No event loop in here."""
