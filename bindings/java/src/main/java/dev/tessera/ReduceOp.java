package dev.tessera;

/** Reductions. */
public enum ReduceOp {
    /** The sum. */
    SUM(1),
    /** The sum divided by the number of ranks; integers are truncated towards zero. */
    AVG(2),
    /** The smallest. */
    MIN(3),
    /** The largest. */
    MAX(4),
    /** The product. */
    PROD(5);

    private final int number;

    ReduceOp(int number) {
        this.number = number;
    }

    int number() {
        return number;
    }
}
