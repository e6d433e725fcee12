/**
 * Distributed training for the JVM: collectives, data-, fully sharded and tensor-parallel training, and sharded
 * checkpoints over the native library Tessera. Ranks of one job may be Java, C, Python and Rust programs.
 *
 * <p>A training program joins its job with {@link dev.tessera.Comm#fromEnv()}, registers its parameters with {@link
 * dev.tessera.Ddp}, or with {@link dev.tessera.Fsdp} if they do not fit one rank's memory, or with {@link
 * dev.tessera.TensorParallel} if ranks share the computation of a layer, updates them with an {@link
 * dev.tessera.Optimizer}, takes its samples from a {@link dev.tessera.Sampler} and saves with a {@link
 * dev.tessera.Saver}.
 *
 * <p>Rules that hold for every class: <ul> <li>Tensor memory is never copied: tensors are direct buffers in native byte
 * order, or addresses, contiguous and row-major. <li>Objects with a native part are {@link java.lang.AutoCloseable}.
 * After {@code close()} their methods throw {@link java.lang.IllegalStateException}. Closing while another thread is
 * inside a call is safe: the native part is freed when the last call has returned. A cleaner frees objects that were
 * not closed, and logs them. <li>Methods marked <em>exclusive</em> take one thread at a time; a second one gets an
 * {@link java.lang.IllegalStateException} naming the first. Others may be called from any thread. <li>{@link
 * java.lang.Thread#interrupt()} ends every wait within about 100 ms with a {@link
 * dev.tessera.TesseraInterruptedException}; the thread stays interrupted. A collective that was interrupted fails its
 * communicator. <li>Errors of the library are a {@link dev.tessera.TesseraException}; errors that the binding itself
 * detects are an {@link java.lang.IllegalArgumentException}, {@link java.lang.IllegalStateException} or {@link
 * java.lang.NullPointerException}. <li>Options that are not set have the library's own defaults.
 * </ul>
 */
package dev.tessera;
