"""What every part uses: errors, units, messages, files. Nothing here imports another part."""
