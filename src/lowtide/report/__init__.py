"""Reports: what Lowtide found, as terminal tables, HTML pages, JSON and other tools' formats."""
