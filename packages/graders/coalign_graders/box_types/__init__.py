"""The boxes that `open_sandbox` opens. Start with ``command_box.py``, which has the methods of every box."""
