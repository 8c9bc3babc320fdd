"""What all families share: names, rules, spaces, text and files. No family is named here."""
