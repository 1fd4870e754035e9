"""Native code for codecs and PowerSGD, called through ctypes. Every function has a pure-torch counterpart."""
