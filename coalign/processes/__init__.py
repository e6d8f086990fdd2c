"""Child processes that run what people wrote, and what this process may use of its machine."""
