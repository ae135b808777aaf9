"""Graph in, graph out: record, find, verify, rewrite, fuse and the compile backend; import it as `dpamoe.passes`."""
