"""Tests of lmcache_mp. A package, as installed ones may bring a package of this name too."""
