"""Methods that declare, bind, delete and purge."""
