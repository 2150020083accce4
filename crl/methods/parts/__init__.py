"""The standard parts that methods are assembled from; each fills one extension point of `crl.protocols`."""
