"""Code that exported models carry with them: copied into their folders, it needs no gpfl."""
