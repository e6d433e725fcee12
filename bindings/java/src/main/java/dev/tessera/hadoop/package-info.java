/** Checkpoints in Hadoop file systems. Needs hadoop-client-api, which the program must provide. */
package dev.tessera.hadoop;
