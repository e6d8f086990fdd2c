"""What `open_sandbox` (boxes.py) opens. Start with ``command_box.py``, which has the methods of every box."""
