package dev.tessera;

import java.util.Map;

/**
 * An object of yours whose values a {@link State} collects at each save and gives back at each load, as
 * {@code <prefix>.<name>}. Its tensors are added to the state as any other.
 *
 * <pre>{@code
 * final class Best implements Stateful {
 *   double loss = Double.POSITIVE_INFINITY;
 *   public Map<String, Object> stateDict() { return Map.of("loss", loss); }
 *   public void loadStateDict(Map<String, Object> values) { loss = (Double) values.get("loss"); }
 * }
 * State state = State.of("model", ddp).with("best", best);
 * }</pre>
 *
 * <p>The methods run on the thread that saves or loads, before that call returns, in the background or not. What they throw
 * becomes the error of the save or load, on every rank: of the same kind for a {@link TesseraException} and for an
 * {@link java.io.IOException}, else {@link ErrorCode#USER}; on the rank itself the exception is a
 * {@linkplain Throwable#getSuppressed() suppressed} one of that error. Nothing was saved or overwritten then, unless it was
 * {@link #loadStateDict} that failed. Meanwhile state and saver are in use: their methods throw. An object that refers to its
 * state keeps both reachable until the state is closed.
 */
public interface Stateful {
    /**
     * The values that are saved; rank 0's, unless the prefix is {@code rank/<r>/...}. All ranks give the same names.
     *
     * @return by name, of the classes that {@link Values} says
     * @throws Exception any
     */
    Map<String, ?> stateDict() throws Exception;

    /**
     * Looks whether {@link #loadStateDict} would take these values, before anything is overwritten. By default it would.
     *
     * @param values as {@link #loadStateDict} gets them
     * @throws Exception any, if not
     */
    default void checkStateDict(Map<String, Object> values) throws Exception {}

    /**
     * Takes the values back, after the tensors of a load.
     *
     * @param values of all names that {@link #stateDict} gives, as they were saved, whatever their kind; of what the load
     *     allowed to be missing as {@link #stateDict} gave it
     * @throws Exception any
     */
    void loadStateDict(Map<String, Object> values) throws Exception;
}
