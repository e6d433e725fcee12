/** Checkpoints in file systems of Hadoop. Needs hadoop-client-api, which the program brings. */
package dev.tessera.hadoop;
