"""Test doubles for programs that use this package. They ship; nothing else imports them."""
