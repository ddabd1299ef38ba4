"""The documentation: pages, what makes the generated ones (`python -m docs.generate`), and scripts to run."""
