package dev.tessera;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;

/**
 * How a load deviated from a strict one, by names of the state, and whether the data was verified. Lists are
 * unmodifiable.
 */
public final class LoadReport {
    private final List<String> missing;
    private final List<String> unexpected;
    private final List<Cast> cast;
    private final List<String> leftAlone;
    private final boolean verified;

    /** A tensor that was converted. */
    public static final class Cast {
        private final String name;
        private final DType saved;
        private final DType here;

        private Cast(Map<?, ?> told) {
            name = (String) told.get("name");
            saved = dtype(told.get("from"));
            here = dtype(told.get("to"));
        }

        private static DType dtype(Object name) {
            return DType.valueOf(((String) name).toUpperCase(java.util.Locale.ROOT));
        }

        /**
         * Of the state.
         *
         * @return "encoder.weight"
         */
        public String name() {
            return name;
        }

        /**
         * As it is saved.
         *
         * @return the checkpoint's dtype
         */
        public DType saved() {
            return saved;
        }

        /**
         * As it was loaded.
         *
         * @return the state's dtype
         */
        public DType here() {
            return here;
        }

        /** Name and both dtypes. */
        @Override
        public String toString() {
            return name + ": " + saved + " to " + here;
        }
    }

    private LoadReport(Map<?, ?> told) {
        missing = names(told.get("missing"));
        unexpected = names(told.get("unexpected"));
        final List<Cast> casts = new ArrayList<>();
        for (Object one : (List<?>) told.get("cast")) {
            casts.add(new Cast((Map<?, ?>) one));
        }
        cast = List.copyOf(casts);
        leftAlone = names(told.get("left_alone"));
        verified = (Boolean) told.get("verified");
    }

    static LoadReport of(String json) {
        return new LoadReport((Map<?, ?>) Values.fromJson(json));
    }

    private static List<String> names(Object told) {
        final List<String> names = new ArrayList<>();
        for (Object name : (List<?>) told) {
            names.add((String) name);
        }
        return List.copyOf(names);
    }

    /**
     * Names of the state that the checkpoint lacks ({@link LoadOptions#allowMissing}); left unchanged.
     *
     * @return the names
     */
    public List<String> missing() {
        return missing;
    }

    /**
     * Names of the checkpoint that the state lacks ({@link LoadOptions#allowUnexpected}).
     *
     * @return the names
     */
    public List<String> unexpected() {
        return unexpected;
    }

    /**
     * Tensors that were converted ({@link LoadOptions#allowCast}).
     *
     * @return each with its dtypes
     */
    public List<Cast> cast() {
        return cast;
    }

    /**
     * Names of the state that were not loaded because {@link LoadOptions#only} does not match them.
     *
     * @return the names
     */
    public List<String> leftAlone() {
        return leftAlone;
    }

    /**
     * Whether all tensor data matched its checksums: false without {@link LoadOptions#verify} and for formats without
     * checksums, such as safetensors written by others.
     *
     * @return verified or not
     */
    public boolean verified() {
        return verified;
    }

    /** All of it. */
    @Override
    public String toString() {
        return "missing " + missing + ", unexpected " + unexpected + ", cast " + cast + ", left alone " + leftAlone
                + (verified ? ", verified" : ", not verified");
    }
}
