"""The bytes of pages below HBM; nothing here decides what goes where."""
