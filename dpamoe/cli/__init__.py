"""The `dpamoe` command: one file per subcommand, dispatched by `main`."""
