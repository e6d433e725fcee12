package dev.tessera;

/** What ranks create together from a communicator, for {@link Comm#refuse}. */
public enum Creation {
    /** A {@link Ddp}, {@link Fsdp} or {@link TensorParallel} model, or an {@link Engine}. */
    MODEL(1),
    /** A {@link Pipeline}. */
    PIPELINE(2),
    /** A {@link Mesh}. */
    MESH(3),
    /** A communicator, by a split; also a {@link Saver}. */
    COMM(4);

    private final int number;

    Creation(int number) {
        this.number = number;
    }

    int number() {
        return number;
    }
}
