"""The documentation as a site: pages of the repository, and references that are made from the code."""
