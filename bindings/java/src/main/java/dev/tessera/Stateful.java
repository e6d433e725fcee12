package dev.tessera;

import java.util.Map;

/**
 * A custom object whose values a {@link State} collects at each save and gives back at each load, as {@code
 * <prefix>.<name>}. Add its tensors to the state like any others.
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
 * <p>The methods run on the thread that saves or loads, before that call returns, even for a save in the background. An
 * exception becomes the error of the save or load on every rank: of the same kind for a {@link TesseraException} and
 * for an {@link java.io.IOException}, else {@link ErrorCode#USER}; on the rank itself the exception is {@linkplain
 * Throwable#getSuppressed() suppressed} in that error. Nothing is saved or overwritten then, unless {@link
 * #loadStateDict} failed. The state and saver are in use during the call, so their methods throw. An object that refers
 * to its state keeps both reachable until the state is closed.
 */
public interface Stateful {
    /**
     * The values to save; rank 0's are saved, unless the prefix is {@code rank/<r>/...}. All ranks must return the same
     * names.
     *
     * @return by name, of the classes listed in {@link Values}
     * @throws Exception any
     */
    Map<String, ?> stateDict() throws Exception;

    /**
     * Check that {@link #loadStateDict} would accept these values, before anything is overwritten. The default accepts
     * them.
     *
     * @param values as for {@link #loadStateDict}
     * @throws Exception any, if it would not
     */
    default void checkStateDict(Map<String, Object> values) throws Exception {}

    /**
     * Restore the values, after the tensors of a load.
     *
     * @param values the saved values of all names that {@link #stateDict} returns, whatever their kind; for names that
     *     the load allowed to be missing, the values that {@link #stateDict} returned
     * @throws Exception any
     */
    void loadStateDict(Map<String, Object> values) throws Exception;
}
