package dev.tessera;

import java.nio.DoubleBuffer;
import java.nio.FloatBuffer;
import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.function.Supplier;

/**
 * An ordered list of named tensors: the parameters of a model. Immutable; {@link #and} returns a longer one.
 *
 * <p>Parameters are updated in place, so they must be in native memory: a direct buffer or a {@link Tensor}. Arrays are
 * not accepted, because their values would never change. Start with a copy of an array, and read the values back from
 * there: {@code Params.of("w", Tensor.copyOf(array, 128, 64))}, then {@link Ddp#param}.
 */
public final class Params {
    private final Map<String, Tensor> tensors;

    private Params(Map<String, Tensor> tensors) {
        this.tensors = tensors;
    }

    /**
     * One parameter.
     *
     * @param name "fc1.weight": dots between modules
     * @param tensor contiguous, floating-point
     * @return the parameters
     */
    public static Params of(String name, Tensor tensor) {
        return new Params(new LinkedHashMap<>()).and(name, tensor);
    }

    /**
     * One parameter of F32.
     *
     * @param name "fc1.weight": dots between modules
     * @param data direct, native byte order
     * @param shape sizes of the dimensions; none for one dimension
     * @return the parameters
     * @throws IllegalArgumentException as {@link Tensor#of(FloatBuffer, long...)}; the message names the parameter
     */
    public static Params of(String name, FloatBuffer data, long... shape) {
        return of(name, named(name, () -> Tensor.of(data, shape)));
    }

    /**
     * One parameter of F64.
     *
     * @param name "fc1.weight": dots between modules
     * @param data direct, native byte order
     * @param shape sizes of the dimensions; none for one dimension
     * @return the parameters
     * @throws IllegalArgumentException as {@link Tensor#of(FloatBuffer, long...)}; the message names the parameter
     */
    public static Params of(String name, DoubleBuffer data, long... shape) {
        return of(name, named(name, () -> Tensor.of(data, shape)));
    }

    /**
     * Parameters of a map, in its order of iteration, which must be the same on every rank.
     *
     * @param tensors by name
     * @return the parameters
     */
    public static Params of(Map<String, Tensor> tensors) {
        Params params = new Params(Map.of());
        for (Map.Entry<String, Tensor> entry : tensors.entrySet()) {
            params = params.and(entry.getKey(), entry.getValue());
        }
        return params;
    }

    /**
     * These parameters and one more.
     *
     * @param name differs from the previous names
     * @param tensor contiguous, floating-point
     * @return a new object
     */
    public Params and(String name, Tensor tensor) {
        Native.utf8(name, "name");
        final Map<String, Tensor> more = new LinkedHashMap<>(tensors);
        if (more.putIfAbsent(name, Objects.requireNonNull(tensor, "tensor")) != null) {
            throw new IllegalArgumentException("two parameters are named \"" + name + "\"");
        }
        return new Params(more);
    }

    /**
     * These and one more of F32.
     *
     * @param name differs from the previous names
     * @param data direct, native byte order
     * @param shape sizes of the dimensions; none for one dimension
     * @return a new object
     * @throws IllegalArgumentException as {@link Tensor#of(FloatBuffer, long...)}; the message names the parameter
     */
    public Params and(String name, FloatBuffer data, long... shape) {
        return and(name, named(name, () -> Tensor.of(data, shape)));
    }

    /**
     * These and one more of F64.
     *
     * @param name differs from the previous names
     * @param data direct, native byte order
     * @param shape sizes of the dimensions; none for one dimension
     * @return a new object
     * @throws IllegalArgumentException as {@link Tensor#of(FloatBuffer, long...)}; the message names the parameter
     */
    public Params and(String name, DoubleBuffer data, long... shape) {
        return and(name, named(name, () -> Tensor.of(data, shape)));
    }

    /** The tensor of a parameter; the message of an exception names it. */
    static Tensor named(String name, Supplier<Tensor> tensor) {
        try {
            return tensor.get();
        } catch (IllegalArgumentException error) {
            throw new IllegalArgumentException("parameter \"" + name + "\": " + error.getMessage());
        }
    }

    /**
     * The number of parameters.
     *
     * @return at least 0
     */
    public int size() {
        return tensors.size();
    }

    /**
     * The names, in order.
     *
     * @return unmodifiable
     */
    public List<String> names() {
        return Collections.unmodifiableList(new ArrayList<>(tensors.keySet()));
    }

    /**
     * The tensors, in order.
     *
     * @return unmodifiable
     */
    public List<Tensor> tensors() {
        return Collections.unmodifiableList(new ArrayList<>(tensors.values()));
    }

    byte[][] nameBytes() {
        return tensors.keySet().stream().map(name -> Native.utf8(name, "name")).toArray(byte[][]::new);
    }

    long[] descriptors() {
        return Tensor.descriptors(tensors.values());
    }
}
