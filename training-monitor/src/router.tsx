import {
  createContext,
  useCallback,
  useContext,
  useEffect,
  useMemo,
  useState,
  type AnchorHTMLAttributes,
  type MouseEvent,
  type ReactNode,
} from "react";

export type Params = Record<string, string>;

type Location = { path: string; search: URLSearchParams };

const LocationContext = createContext<Location>({ path: "/", search: new URLSearchParams() });

function readLocation(): Location {
  return { path: window.location.pathname, search: new URLSearchParams(window.location.search) };
}

/** Go to an address of the app; `replace` leaves no entry in the history (used for scrubbing). */
export function navigate(to: string, options: { replace?: boolean } = {}): void {
  if (options.replace) window.history.replaceState(null, "", to);
  else window.history.pushState(null, "", to);
  window.dispatchEvent(new Event("monitor:navigate"));
}

/** Keeps the location in React state; everything below can read it. */
export function Router({ children }: { children: ReactNode }) {
  const [location, setLocation] = useState(readLocation);
  useEffect(() => {
    const update = () => setLocation(readLocation());
    window.addEventListener("popstate", update);
    window.addEventListener("monitor:navigate", update);
    return () => {
      window.removeEventListener("popstate", update);
      window.removeEventListener("monitor:navigate", update);
    };
  }, []);
  return <LocationContext.Provider value={location}>{children}</LocationContext.Provider>;
}

export function useLocation(): Location {
  return useContext(LocationContext);
}

/** One query parameter as state: everything that can be seen has an address. */
export function useSearchParam(name: string, fallback = ""): [string, (value: string, replace?: boolean) => void] {
  const { search } = useLocation();
  const value = search.get(name) ?? fallback;
  const set = useCallback(
    (next: string, replace = true) => {
      const current = new URLSearchParams(window.location.search);
      if (next === fallback) current.delete(name);
      else current.set(name, next);
      const query = current.toString();
      navigate(window.location.pathname + (query ? `?${query}` : ""), { replace });
    },
    [name, fallback],
  );
  return [value, set];
}

/** Change query parameters in one go, leaving no entry in the history; an empty value takes one away. */
export function replaceSearch(changes: Record<string, string>): void {
  const current = new URLSearchParams(window.location.search);
  for (const [name, value] of Object.entries(changes)) {
    if (value === "") current.delete(name);
    else current.set(name, value);
  }
  const query = current.toString();
  navigate(window.location.pathname + (query ? `?${query}` : ""), { replace: true });
}

/** Match "/runs/:runId/steps/:step" against a path; null if it does not fit. */
export function matchPath(pattern: string, path: string): Params | null {
  const wanted = pattern.split("/").filter(Boolean);
  const given = path.split("/").filter(Boolean);
  if (wanted.length !== given.length) return null;
  const params: Params = {};
  for (const [index, part] of wanted.entries()) {
    const value = given[index] ?? "";
    if (part.startsWith(":")) {
      try {
        params[part.slice(1)] = decodeURIComponent(value);
      } catch {
        return null;
      }
    } else if (part !== value) return null;
  }
  return params;
}

export type Route = { pattern: string; render: (params: Params) => ReactNode };

export function useRoute(routes: readonly Route[]): ReactNode {
  const { path } = useLocation();
  return useMemo(() => {
    for (const route of routes) {
      const params = matchPath(route.pattern, path);
      if (params) return route.render(params);
    }
    return null;
  }, [routes, path]);
}

type LinkProps = AnchorHTMLAttributes<HTMLAnchorElement> & { to: string };

/** An ordinary link (it can be copied and opened in a tab) that does not reload the page. */
export function Link({ to, onClick, children, ...rest }: LinkProps) {
  const follow = (event: MouseEvent<HTMLAnchorElement>) => {
    onClick?.(event);
    if (event.defaultPrevented || event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault();
    navigate(to);
    window.scrollTo(0, 0);
  };
  return (
    <a href={to} onClick={follow} {...rest}>
      {children}
    </a>
  );
}
