"""One optimizer step done right under any plan."""
