package dev.tessera;

import java.util.List;
import java.util.Objects;
import java.util.function.LongUnaryOperator;

/**
 * SGD, Adam, AdamW, Adagrad, Lion or Lamb over a {@link Ddp} (its parameters and gradients), an {@link Fsdp} (its shards and
 * their gradients), a {@link TensorParallel} (its slices and their gradients) or tensors. Created by a builder. Calls that
 * change gradients, parameters or settings are exclusive.
 */
public final class Optimizer extends NativeObject {
    private final Object over; // keeps the model reachable

    private Optimizer(Ref ref, Object over) {
        super(ref);
        this.over = over;
    }

    /** That of an engine, which makes its steps. */
    static Optimizer of(Engine engine) {
        final long handle = engine.ref.callLongExclusive(Native::engineOptimizer);
        return new Optimizer(new Ref("Optimizer", handle, Native::optimizerDestroy).mayLeak().dependOn(engine.ref), engine);
    }

    /** What an optimizer updates: a Ddp, an Fsdp, a TensorParallel, or params and grads. */
    private static final class Target {
        private final NativeObject model;
        private final Params params;
        private final List<Tensor> grads;

        Target(NativeObject model, String what) {
            this.model = Objects.requireNonNull(model, what);
            params = null;
            grads = null;
        }

        Target(Params params, List<Tensor> grads) {
            if (params.size() != grads.size()) {
                throw new IllegalArgumentException("got " + grads.size() + " gradients for " + params.size() + " parameters");
            }
            model = null;
            this.params = params;
            this.grads = List.copyOf(grads);
        }

        Optimizer make(LongUnaryOperator ofDdp, LongUnaryOperator ofFsdp, LongUnaryOperator ofTp, Factory ofTensors) {
            if (model != null) {
                return over(model, model instanceof Ddp ? ofDdp : model instanceof Fsdp ? ofFsdp : ofTp);
            }
            final long handle =
                    ofTensors.create(params.nameBytes(), params.descriptors(), Tensor.descriptors(grads));
            return new Optimizer(new Ref("Optimizer", handle, Native::optimizerDestroy)
                    .keep(new Object[] {params, grads}), null);
        }

        private static Optimizer over(NativeObject model, LongUnaryOperator create) {
            return new Optimizer(new Ref("Optimizer", model.ref.callLongExclusive(create), Native::optimizerDestroy)
                    .dependOn(model.ref), model);
        }
    }

    private interface Factory {
        long create(byte[][] names, long[] tensors, long[] grads);
    }

    /**
     * Start building an SGD optimizer over a DDP object.
     *
     * @param ddp the model whose parameters are updated; closing it closes the optimizer
     * @return a builder with the library's defaults
     */
    public static Sgd sgd(Ddp ddp) {
        return new Sgd(new Target(ddp, "ddp"));
    }

    /**
     * Start building an SGD optimizer over the shards of an FSDP object.
     *
     * @param fsdp the model whose trained shards are updated; closing it closes the optimizer
     * @return a builder with the library's defaults
     */
    public static Sgd sgd(Fsdp fsdp) {
        return new Sgd(new Target(fsdp, "fsdp"));
    }

    /**
     * Start building an SGD optimizer over the slices of a tensor-parallel model.
     *
     * @param tp the model whose floating-point slices are updated; closing it closes the optimizer
     * @return a builder with the library's defaults
     */
    public static Sgd sgd(TensorParallel tp) {
        return new Sgd(new Target(tp, "tp"));
    }

    /**
     * Start building an SGD optimizer over tensors.
     *
     * @param params F32 or F64; kept reachable until the optimizer is closed
     * @param grads one for each parameter, with its dtype and shape; kept reachable too
     * @return a builder with the library's defaults
     */
    public static Sgd sgd(Params params, List<Tensor> grads) {
        return new Sgd(new Target(params, grads));
    }

    /**
     * Start building an Adam optimizer over a DDP object.
     *
     * @param ddp the model whose parameters are updated; closing it closes the optimizer
     * @return a builder with the library's defaults
     */
    public static Adam adam(Ddp ddp) {
        return new Adam(new Target(ddp, "ddp"), false);
    }

    /**
     * Start building an Adam optimizer over the shards of an FSDP object.
     *
     * @param fsdp the model whose trained shards are updated; closing it closes the optimizer
     * @return a builder with the library's defaults
     */
    public static Adam adam(Fsdp fsdp) {
        return new Adam(new Target(fsdp, "fsdp"), false);
    }

    /**
     * Start building an Adam optimizer over the slices of a tensor-parallel model.
     *
     * @param tp the model whose floating-point slices are updated; closing it closes the optimizer
     * @return a builder with the library's defaults
     */
    public static Adam adam(TensorParallel tp) {
        return new Adam(new Target(tp, "tp"), false);
    }

    /**
     * Start building an Adam optimizer over tensors.
     *
     * @param params F32 or F64; kept reachable until the optimizer is closed
     * @param grads one for each parameter, with its dtype and shape; kept reachable too
     * @return a builder with the library's defaults
     */
    public static Adam adam(Params params, List<Tensor> grads) {
        return new Adam(new Target(params, grads), false);
    }

    /**
     * Start building an AdamW optimizer (Adam with decoupled weight decay) over a DDP object.
     *
     * @param ddp the model whose parameters are updated; closing it closes the optimizer
     * @return a builder with the library's defaults
     */
    public static Adam adamW(Ddp ddp) {
        return new Adam(new Target(ddp, "ddp"), true);
    }

    /**
     * Start building an AdamW optimizer (Adam with decoupled weight decay) over the shards of an FSDP object.
     *
     * @param fsdp the model whose trained shards are updated; closing it closes the optimizer
     * @return a builder with the library's defaults
     */
    public static Adam adamW(Fsdp fsdp) {
        return new Adam(new Target(fsdp, "fsdp"), true);
    }

    /**
     * Start building an AdamW optimizer (Adam with decoupled weight decay) over the slices of a tensor-parallel model.
     *
     * @param tp the model whose floating-point slices are updated; closing it closes the optimizer
     * @return a builder with the library's defaults
     */
    public static Adam adamW(TensorParallel tp) {
        return new Adam(new Target(tp, "tp"), true);
    }

    /**
     * Start building an AdamW optimizer (Adam with decoupled weight decay) over tensors.
     *
     * @param params F32 or F64; kept reachable until the optimizer is closed
     * @param grads one for each parameter, with its dtype and shape; kept reachable too
     * @return a builder with the library's defaults
     */
    public static Adam adamW(Params params, List<Tensor> grads) {
        return new Adam(new Target(params, grads), true);
    }

    /**
     * Start building an Adagrad optimizer over a DDP object.
     *
     * @param ddp the model whose parameters are updated; closing it closes the optimizer
     * @return a builder with the library's defaults
     */
    public static Adagrad adagrad(Ddp ddp) {
        return new Adagrad(new Target(ddp, "ddp"));
    }

    /**
     * Start building an Adagrad optimizer over the shards of an FSDP object.
     *
     * @param fsdp the model whose trained shards are updated; closing it closes the optimizer
     * @return a builder with the library's defaults
     */
    public static Adagrad adagrad(Fsdp fsdp) {
        return new Adagrad(new Target(fsdp, "fsdp"));
    }

    /**
     * Start building an Adagrad optimizer over the slices of a tensor-parallel model.
     *
     * @param tp the model whose floating-point slices are updated; closing it closes the optimizer
     * @return a builder with the library's defaults
     */
    public static Adagrad adagrad(TensorParallel tp) {
        return new Adagrad(new Target(tp, "tp"));
    }

    /**
     * Start building an Adagrad optimizer over tensors.
     *
     * @param params F32 or F64; kept reachable until the optimizer is closed
     * @param grads one for each parameter, with its dtype and shape; kept reachable too
     * @return a builder with the library's defaults
     */
    public static Adagrad adagrad(Params params, List<Tensor> grads) {
        return new Adagrad(new Target(params, grads));
    }

    /**
     * Start building a Lion optimizer over a DDP object.
     *
     * @param ddp the model whose parameters are updated; closing it closes the optimizer
     * @return a builder with the library's defaults
     */
    public static Lion lion(Ddp ddp) {
        return new Lion(new Target(ddp, "ddp"));
    }

    /**
     * Start building a Lion optimizer over the shards of an FSDP object.
     *
     * @param fsdp the model whose trained shards are updated; closing it closes the optimizer
     * @return a builder with the library's defaults
     */
    public static Lion lion(Fsdp fsdp) {
        return new Lion(new Target(fsdp, "fsdp"));
    }

    /**
     * Start building a Lion optimizer over the slices of a tensor-parallel model.
     *
     * @param tp the model whose floating-point slices are updated; closing it closes the optimizer
     * @return a builder with the library's defaults
     */
    public static Lion lion(TensorParallel tp) {
        return new Lion(new Target(tp, "tp"));
    }

    /**
     * Start building a Lion optimizer over tensors.
     *
     * @param params F32 or F64; kept reachable until the optimizer is closed
     * @param grads one for each parameter, with its dtype and shape; kept reachable too
     * @return a builder with the library's defaults
     */
    public static Lion lion(Params params, List<Tensor> grads) {
        return new Lion(new Target(params, grads));
    }

    /**
     * Start building a Lamb optimizer over a DDP object.
     *
     * @param ddp the model whose parameters are updated; closing it closes the optimizer
     * @return a builder with the library's defaults
     */
    public static Lamb lamb(Ddp ddp) {
        return new Lamb(new Target(ddp, "ddp"));
    }

    /**
     * Start building a Lamb optimizer over the shards of an FSDP object.
     *
     * @param fsdp the model whose trained shards are updated; closing it closes the optimizer
     * @return a builder with the library's defaults
     */
    public static Lamb lamb(Fsdp fsdp) {
        return new Lamb(new Target(fsdp, "fsdp"));
    }

    /**
     * Start building a Lamb optimizer over the slices of a tensor-parallel model.
     *
     * @param tp the model whose floating-point slices are updated; closing it closes the optimizer
     * @return a builder with the library's defaults
     */
    public static Lamb lamb(TensorParallel tp) {
        return new Lamb(new Target(tp, "tp"));
    }

    /**
     * Start building a Lamb optimizer over tensors.
     *
     * @param params F32 or F64; kept reachable until the optimizer is closed
     * @param grads one for each parameter, with its dtype and shape; kept reachable too
     * @return a builder with the library's defaults
     */
    public static Lamb lamb(Params params, List<Tensor> grads) {
        return new Lamb(new Target(params, grads));
    }

    /** Settings of stochastic gradient descent; options that are not set have the library's defaults. */
    public static final class Sgd extends SgdOptionsFields<Sgd> {
        private final Target target;
        private Sgd(Target target) {
            this.target = target;
        }

        /**
         * Create the optimizer.
         *
         * @return the optimizer
         * @throws TesseraInvalidArgumentException if a setting or a tensor is invalid
         */
        public Optimizer build() {
            return target.make(ddp -> Native.ddpSgd(ddp, this), fsdp -> Native.fsdpSgd(fsdp, this),
                    tp -> Native.tpSgd(tp, this),
                    (names, tensors, grads) -> Native.sgdCreate(names, tensors, grads, this));
        }
    }

    /** Settings of Adam and AdamW; options that are not set have the library's defaults. */
    public static final class Adam extends AdamOptionsFields<Adam> {
        private final Target target;
        private final boolean decoupled;
        private Adam(Target target, boolean decoupled) {
            this.target = target;
            this.decoupled = decoupled;
            if (decoupled) {
                Native.adamwOptionsInit(this);
            }
        }

        /**
         * Decay rates of the two moments; the defaults are 0.9 and 0.999.
         *
         * @param first 0 to below 1
         * @param second 0 to below 1
         * @return this
         */
        public Adam betas(double first, double second) {
            return beta1(first).beta2(second);
        }

        /**
         * Adam: times the parameter, added to the gradient; default 0. AdamW: decoupled, {@code param *= 1 - lr *
         * weightDecay}; default 0.01.
         *
         * @param value the new one
         * @return this
         */
        @Override
        public Adam weightDecay(double value) {
            return super.weightDecay(value);
        }

        /**
         * Create the optimizer.
         *
         * @return the optimizer
         * @throws TesseraInvalidArgumentException if a setting or a tensor is invalid
         */
        public Optimizer build() {
            if (decoupled) {
                return target.make(ddp -> Native.ddpAdamw(ddp, this), fsdp -> Native.fsdpAdamw(fsdp, this),
                        tp -> Native.tpAdamw(tp, this),
                        (names, tensors, grads) -> Native.adamwCreate(names, tensors, grads, this));
            }
            return target.make(ddp -> Native.ddpAdam(ddp, this), fsdp -> Native.fsdpAdam(fsdp, this),
                    tp -> Native.tpAdam(tp, this),
                    (names, tensors, grads) -> Native.adamCreate(names, tensors, grads, this));
        }
    }

    /** Settings of Adagrad; options that are not set have the library's defaults. */
    public static final class Adagrad extends AdagradOptionsFields<Adagrad> {
        private final Target target;
        private Adagrad(Target target) {
            this.target = target;
        }

        /**
         * Create the optimizer.
         *
         * @return the optimizer
         * @throws TesseraInvalidArgumentException if a setting or a tensor is invalid
         */
        public Optimizer build() {
            return target.make(ddp -> Native.ddpAdagrad(ddp, this), fsdp -> Native.fsdpAdagrad(fsdp, this),
                    tp -> Native.tpAdagrad(tp, this),
                    (names, tensors, grads) -> Native.adagradCreate(names, tensors, grads, this));
        }
    }

    /**
     * Settings of Lion (Chen et al. 2023): each element moves by the rate against the sign of a mean of gradients. An element
     * whose mean is 0 stays, where DeepSpeed's Lion moves it. Options that are not set have the library's defaults.
     */
    public static final class Lion extends LionOptionsFields<Lion> {
        private final Target target;
        private Lion(Target target) {
            this.target = target;
        }

        /**
         * The weight of the mean of gradients in the direction of a step, and its decay rate; the defaults are 0.9 and 0.99.
         *
         * @param first 0 to below 1
         * @param second 0 to below 1
         * @return this
         */
        public Lion betas(double first, double second) {
            return beta1(first).beta2(second);
        }

        /**
         * Create the optimizer.
         *
         * @return the optimizer
         * @throws TesseraInvalidArgumentException if a setting or a tensor is invalid
         */
        public Optimizer build() {
            return target.make(ddp -> Native.ddpLion(ddp, this), fsdp -> Native.fsdpLion(fsdp, this),
                    tp -> Native.tpLion(tp, this),
                    (names, tensors, grads) -> Native.lionCreate(names, tensors, grads, this));
        }
    }

    /**
     * Settings of Lamb (You et al. 2020) as DeepSpeed's FusedLamb, for parameters in host memory: the direction of Adam plus
     * weight decay, scaled for each parameter by its trust ratio, the norm of the parameter over that of the direction, or 1
     * if one of them is 0. The norms have the same bits however ranks divide a parameter. Over an {@link Fsdp}, a {@link
     * TensorParallel} or a {@link Ddp} of its slices, {@link Optimizer#step} is collective. Options that are not set have
     * the library's defaults.
     */
    public static final class Lamb extends LambOptionsFields<Lamb> {
        private final Target target;
        private Lamb(Target target) {
            this.target = target;
        }

        /**
         * Decay rates of the two moments; the defaults are 0.9 and 0.999.
         *
         * @param first 0 to below 1
         * @param second 0 to below 1
         * @return this
         */
        public Lamb betas(double first, double second) {
            return beta1(first).beta2(second);
        }

        /**
         * Create the optimizer.
         *
         * @return the optimizer
         * @throws TesseraInvalidArgumentException if a setting or a tensor is invalid
         * @throws TesseraException with {@link ErrorCode#UNSUPPORTED} if the parameters are on a device, or the ranks of a
         *     host share them
         */
        public Optimizer build() {
            return target.make(ddp -> Native.ddpLamb(ddp, this), fsdp -> Native.fsdpLamb(fsdp, this),
                    tp -> Native.tpLamb(tp, this),
                    (names, tensors, grads) -> Native.lambCreate(names, tensors, grads, this));
        }
    }

    /**
     * Update every parameter from its gradient. Gradients are unchanged. With {@link Lamb} over an {@link Fsdp} or a {@link
     * TensorParallel} it is collective.
     *
     * @throws TesseraInvalidStateException if the model's gradients are being reduced, none were reduced since the last
     *     step (with synchronisation), units of an FSDP model are unsharded, or {@link TensorParallel#sumGrads} was not
     *     called since the last step although ranks have parts of gradients
     */
    public void step() {
        ref.runExclusive(Native::optimizerStep);
    }

    /**
     * Join the optimizers of ranks that have different parameters, such as the stages of a pipeline: from now on {@link
     * #clipGradNorm(double, double)} and a scaler's unscaling take the gradients of all of them into account and are
     * collective. A parameter that several stages share under the same name counts once. All these ranks must call it,
     * once.
     *
     * @param comm one rank of each stage, such as those of the pipeline; do not close it before the optimizer
     * @throws TesseraInvalidArgumentException if two ranks hold different parts of a parameter
     * @throws TesseraInvalidStateException if a rank has joined its optimizer already
     */
    public void join(Comm comm) {
        ref.runExclusive(h -> comm.ref.runExclusive(c -> Native.optimizerJoin(h, c)));
    }

    /**
     * Scale all gradients so that their 2-norm is at most {@code maxNorm}: see {@link #clipGradNorm(double, double)}.
     *
     * @param maxNorm finite, not negative
     * @return the norm before scaling
     */
    public double clipGradNorm(double maxNorm) {
        return clipGradNorm(maxNorm, 2);
    }

    /**
     * Scale all gradients so that their norm is at most {@code maxNorm}. Call it before {@link #step}. Over an {@link
     * Fsdp} or a {@link TensorParallel} it uses the norm of all ranks' shards or slices and is collective; over a {@link
     * Ddp}, whose gradients are the same on every rank, it is local unless {@link #join} was called.
     *
     * @param maxNorm finite, not negative
     * @param p the norm's order: at least 1, or infinity for the largest magnitude
     * @return the norm before scaling; infinite if there are infinities or NaN, which are left unchanged
     * @throws TesseraInvalidArgumentException if either number is invalid
     * @throws TesseraInvalidStateException if the model's gradients are being reduced, or the optimizer steps in backward
     * @throws TesseraInterruptedException over an Fsdp or a TensorParallel: its communicator has ended
     */
    public double clipGradNorm(double maxNorm, double p) {
        return ref.callExclusive(h -> Native.optimizerClipGradNorm(h, maxNorm, p));
    }

    /**
     * Clamp every gradient to [-most, most]; NaN is unchanged. Call it before {@link #step}.
     *
     * @param most finite, not negative
     * @throws TesseraInvalidArgumentException if the number is invalid
     * @throws TesseraInvalidStateException as {@link #step}
     */
    public void clipGradValue(double most) {
        ref.runExclusive(h -> Native.optimizerClipGradValue(h, most));
    }

    /**
     * Run all later calls in the order of a CUDA stream, for parameters on a device. Before the first call they run on
     * the device's default stream. {@link #step} and {@link #zeroGrad} return once they are on the stream; calls that
     * return a number wait for it.
     *
     * @param stream the address of a stream of the parameters' device, which exists until the optimizer has another one or
     *     is closed; 0 is the default stream
     * @throws TesseraInvalidArgumentException if the stream is of another device, or the parameters are in host memory
     */
    public void setStream(long stream) {
        ref.runExclusive(h -> Native.optimizerSetStream(h, stream));
    }

    /** Set every gradient to zero. */
    public void zeroGrad() {
        ref.runExclusive(Native::optimizerZeroGrad);
    }

    /**
     * The learning rate of the next step.
     *
     * @return the rate
     */
    public double lr() {
        return ref.call(Native::optimizerLr);
    }

    /**
     * Set the learning rate of the next step.
     *
     * @param lr finite, not negative
     */
    public void setLr(double lr) {
        ref.runExclusive(h -> Native.optimizerSetLr(h, lr));
    }

    /**
     * Number of steps made, including those before a loaded checkpoint.
     *
     * @return steps
     */
    public long steps() {
        return ref.callLong(Native::optimizerSteps);
    }
}
