"""Standard parts of methods. Each part implements one extension point of `crl.protocols`."""
