/**
 * Distributed training for the JVM: collectives, data-parallel training and sharded checkpoints over the native library
 * Tessera. Ranks of one job may be Java, C, Python and Rust programs.
 *
 * <p>A training program joins its job with {@link dev.tessera.Comm#fromEnv()}, registers its parameters with
 * {@link dev.tessera.Ddp}, or {@link dev.tessera.Fsdp} where one rank's memory does not hold them all, updates them with an
 * {@link dev.tessera.Optimizer}, takes its samples from a {@link dev.tessera.Sampler} and saves with a
 * {@link dev.tessera.Saver}.
 *
 * <p>Rules that hold for every class:
 * <ul>
 * <li>Tensor memory is never copied: tensors are direct buffers in native byte order, or addresses, contiguous and
 *     row-major.
 * <li>Objects with a native half are {@link java.lang.AutoCloseable}. After {@code close()} their methods throw
 *     {@link java.lang.IllegalStateException}. Closing while another thread is inside a call is safe: the native half is
 *     freed when the last call has returned. What was forgotten is freed by a cleaner, which logs it.
 * <li>Methods marked <em>exclusive</em> take one thread at a time; a second one gets an
 *     {@link java.lang.IllegalStateException} naming the first. Others may be called from any thread.
 * <li>{@link java.lang.Thread#interrupt()} ends every wait within about 100 ms with a
 *     {@link dev.tessera.TesseraInterruptedException}; the thread stays interrupted. A collective that was interrupted
 *     fails its communicator.
 * <li>What the library refuses is a {@link dev.tessera.TesseraException}; what the binding itself sees to be wrong is an
 *     {@link java.lang.IllegalArgumentException}, {@link java.lang.IllegalStateException} or
 *     {@link java.lang.NullPointerException}.
 * <li>Options that are not set have the library's own defaults.
 * </ul>
 */
package dev.tessera;
