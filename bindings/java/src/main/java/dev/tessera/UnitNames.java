package dev.tessera;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.function.IntFunction;

/** The names and numbers of a model whose parameters are in units. Parameters are numbered through the units. Immutable. */
final class UnitNames {
    private final List<String> units;
    private final List<String> params = new ArrayList<>(); // without wrappers
    private final Map<String, Integer> numberOfUnit = new HashMap<>();
    private final Map<String, Integer> numberOfParam = new HashMap<>(); // with and without wrappers
    private final int[] firstOf; // parameter of each unit, and their number

    /**
     * @param units their names
     * @param given the parameters of each unit as the program named them
     * @param nameOf a parameter as the library names it, without wrappers
     */
    UnitNames(List<String> units, List<Params> given, IntFunction<String> nameOf) {
        this.units = List.copyOf(units);
        firstOf = new int[units.size() + 1];
        for (int u = 0; u < units.size(); ++u) {
            numberOfUnit.put(units.get(u), u);
            int i = firstOf[u];
            for (String name : given.get(u).names()) {
                numberOfParam.put(name, i++);
            }
            firstOf[u + 1] = i;
        }
        for (int i = 0; i < firstOf[units.size()]; ++i) {
            params.add(nameOf.apply(i));
            numberOfParam.put(params.get(i), i);
        }
    }

    List<String> units() {
        return units;
    }

    int unitCount() {
        return units.size();
    }

    int paramCount() {
        return params.size();
    }

    /** How many parameters a unit has. */
    int paramCount(int unit) {
        return firstOf[unit + 1] - firstOf[unit];
    }

    String unit(int unit) {
        return units.get(checkUnit(unit));
    }

    String param(int index) {
        return params.get(check(index));
    }

    int unit(String name) {
        return find(numberOfUnit, name, "unit", units);
    }

    int param(String name) {
        return find(numberOfParam, name, "parameter", params);
    }

    /** Whether the program or the library has a parameter of this name. */
    boolean has(String name) {
        return numberOfParam.containsKey(name);
    }

    int unitOf(int index) {
        check(index);
        int unit = 0;
        while (index >= firstOf[unit + 1]) {
            ++unit;
        }
        return unit;
    }

    /** Which parameter of the unit it is. */
    int place(int unit, int index) {
        check(index);
        final int place = index - firstOf[unit];
        if (place < 0 || place >= paramCount(unit)) {
            throw new IllegalArgumentException("parameter \"" + params.get(index) + "\" does not belong to unit \""
                    + units.get(unit) + "\"; it has " + params.subList(firstOf[unit], firstOf[unit + 1]));
        }
        return place;
    }

    int check(int index) {
        if (index < 0 || index >= params.size()) {
            throw new IndexOutOfBoundsException("parameter " + index + " does not exist; the model has " + params.size());
        }
        return index;
    }

    int checkUnit(int unit) {
        if (unit < 0 || unit >= units.size()) {
            throw new IndexOutOfBoundsException("unit " + unit + " does not exist; the model has " + units.size());
        }
        return unit;
    }

    private static int find(Map<String, Integer> all, String name, String what, List<String> names) {
        final Integer number = all.get(Objects.requireNonNull(name, what));
        if (number == null) {
            throw new IllegalArgumentException("there is no " + what + " \"" + name + "\"; known: " + names);
        }
        return number;
    }
}
